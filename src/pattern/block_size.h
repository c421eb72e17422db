// The block sizes that kernels know.
#pragma once

namespace longspan {

/// Throws InvalidArgument unless it is 16, 32, 64 or 128.
void check_block_size(int block_size);

}  // namespace longspan
