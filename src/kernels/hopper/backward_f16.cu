// Hopper backward kernels for f16.
#include "kernels/hopper/backward.cuh"

namespace longspan::hopper {

const BackwardStarts kBackwardF16 = {start_prepare<__half>, start_backward<__half>, start_convert<__half>,
                                     start_order<__half>, start_split<__half>};

}  // namespace longspan::hopper
