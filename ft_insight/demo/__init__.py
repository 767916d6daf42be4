"""What `ft-insight demo` trains on: made-up problems, a file reader and a tiny MoE model, all offline."""
