"""The kernels of the fused step as they run on a GPU; ``plain_ops`` has the same names."""

from eyas.drafters.eagle3.fused.attention_backward_kernel import attend_backward
from eyas.drafters.eagle3.fused.attention_kernel import attend
from eyas.drafters.eagle3.fused.loss_kernel import loss_and_gradient_
from eyas.kernels.norm_kernel import rms, rms_backward
from eyas.kernels.pointwise_kernel import rotate, swiglu, swiglu_backward_

__all__ = [
    "attend",
    "attend_backward",
    "loss_and_gradient_",
    "rms",
    "rms_backward",
    "rotate",
    "swiglu",
    "swiglu_backward_",
]
