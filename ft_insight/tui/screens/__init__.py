"""What fills the terminal: the pages behind the tabs, and the help."""
