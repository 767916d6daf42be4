"""What an operator or a kernel does, told from its name alone; what it does that for is told elsewhere."""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CLASSES: tuple[tuple[str, frozenset[str]], ...] = (
    ("matmul", _words("mm addmm bmm baddbmm linear matmul einsum mv addmv dot grouped_mm int_mm scaled_mm tensordot "
                      "mkldnn_linear grouped_mm_fallback addbmm outer bilinear")),
    ("softmax", _words("softmax topk softmax_backward_data sparsemax")),
    ("loss", _words("cross_entropy_loss nll_loss nll_loss_nd nll_loss_forward log_softmax log_softmax_backward_data "
                    "logsumexp kl_div")),
    ("activation", _words("silu gelu relu mish softplus tanh elu leaky_relu hardswish hardsigmoid hardtanh glu selu "
                          "sigmoid log_sigmoid celu threshold")),
    ("norm", _words("layer_norm native_layer_norm rms_norm fused_rms_norm group_norm native_group_norm batch_norm")),
    ("gather", _words("index index_select index_put index_put_impl index_add index_copy index_fill gather scatter "
                      "scatter_add scatter_reduce sort argsort one_hot nonzero nonzero_numpy bincount histc cumsum "
                      "repeat_interleave masked_select masked_scatter take take_along_dim unique unique2 searchsorted "
                      "value_selecting_reduction segment_reduce select slice unsafe_index unsafe_index_put")),
    ("embedding", _words("embedding embedding_dense embedding_bag")),
    ("cast", _words("to to_copy type_as float half bfloat16")),
    ("copy", _words("copy clone contiguous cat concat stack item local_scalar_dense pin_memory repeat tile roll flip "
                    "split_with_sizes_copy constant_pad_nd pad is_nonzero new_tensor tensor split unbind")),
    ("elementwise", _words(
        "add sub rsub mul div neg pow exp exp2 expm1 log log2 log1p sqrt rsqrt sum mean cos sin clamp clamp_min "
        "clamp_max where lt gt le ge eq ne logical_and logical_or logical_not logical_xor bitwise_and bitwise_or "
        "bitwise_not abs maximum minimum max min amax amin any all dropout native_dropout feature_dropout fill zero "
        "zeros ones full arange zeros_like ones_like full_like new_zeros new_ones new_full triu tril masked_fill "
        "floor_divide floor ceil round remainder fmod isnan isinf isfinite std var var_mean prod reciprocal square "
        "erf sign norm linalg_vector_norm addcmul addcdiv lerp argmax argmin count_nonzero linspace rand randn "
        "rand_like uniform normal bernoulli random cumprod diff nan_to_num true_divide and or not xor greater less "
        "less_equal greater_equal not_equal equal sum_to_size scalar_tensor eye fused_dropout")),
    ("view", _words(
        "view reshape reshape_alias unsafe_view t transpose permute expand expand_as squeeze unsqueeze as_strided "
        "narrow chunk unsafe_split unsafe_chunk flatten unflatten alias detach view_as diagonal "
        "movedim swapaxes numpy_t mt h adjoint unfold split_with_sizes lift_fresh result_type resolve_conj "
        "resolve_neg empty empty_like empty_strided new_empty new_empty_strided resize resize_as set set_data real "
        "broadcast_tensors broadcast_to can_cast is_same_size requires_grad output_nr pin view_as_real "
        "view_as_complex ravel tensor_split hsplit vsplit lift record_stream data select_as_view is_pinned")),
)  # fmt: skip
_BY_NAME = {name: cls for cls, names in _CLASSES for name in names}
STREAMING = {
    name + tail
    for cls, names in _CLASSES
    if cls in ("elementwise", "activation", "norm", "softmax")
    for name in names
    for tail in ("", "_", "_backward")
} | {"_softmax", "_softmax_backward_data", "_log_softmax", "_fused_rms_norm", "copy_"}

# patterns for what no table can list: custom operators, autograd functions and names of kernels
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("dequantise", re.compile(r"dequant")),
    (
        "communication",
        re.compile(r"c10d|nccl|gloo|allreduce|all_reduce|allgather|all_gather|reduce_scatter|param_comms"),
    ),
    ("attention", re.compile(r"scaled_dot_product|flash|efficient_attention|flex_attention|fmha|multi_head_attention")),
    ("conv", re.compile(r"conv(?!ert)")),
    ("scan", re.compile(r"selective_scan|chunk_scan|chunk_state|state_passing|ssd_|ssm|pscan")),
    ("norm", re.compile(r"rms_?norm|layer_?norm")),
    ("loss", re.compile(r"cross_?entropy|nll_loss")),
    ("softmax", re.compile(r"softmax|topk")),
    ("matmul", re.compile(r"gemm|matmul|_mm\b|cutlass|cublas|xmma|nvjet")),
    ("activation", re.compile(r"silu|swiglu|gelu|geglu")),
    ("optimizer", re.compile(r"optim|adam")),
    ("gather", re.compile(r"gather|scatter|index|sort")),
)


def class_of(name: str) -> str | None:
    """Tell what an operator does, from its name."""
    space, _, base = name.rpartition("::")
    if space.startswith("aten") or not space:
        plain = base.removeprefix("_foreach_").strip("_").lower()
        for candidate in (plain, plain.removesuffix("_backward"), plain.removesuffix("_out"), plain.split(".")[0]):
            if candidate in _BY_NAME:
                return _BY_NAME[candidate]
    lowered = name.lower()
    return next((cls for cls, pattern in _PATTERNS if pattern.search(lowered)), None)
