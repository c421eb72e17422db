// Hopper backward kernels for bf16.
#include "kernels/hopper/backward.cuh"

namespace longspan::hopper {

const BackwardStarts kBackwardBf16 = {start_prepare<__nv_bfloat16>, start_backward<__nv_bfloat16>,
                                      start_convert<__nv_bfloat16>, start_order<__nv_bfloat16>,
                                      start_split<__nv_bfloat16>};

}  // namespace longspan::hopper
