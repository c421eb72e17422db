// Designated initialisers of the public aggregates name what differs and leave the rest: no warning for what they
// leave.
#include <longspan/longspan.h>

namespace longspan {

inline const Options kOptions = {.causal = true};
inline const Problem kProblem = {.tokens = 64};
inline const Branch kBranch = {.segment = 64};
inline const BlockTerm kTerm = {.density = 0.5};
inline const KeyPiece kPiece = {.first = 1};
inline const Call kCall = {.dropout_seed = 1};
inline const ConstTensorView kView = {.dtype = DType::bf16};
inline const RingOptions kRing = {.checksums = false};
inline const LocalFault kFault = {.rank = 1};
inline const LocalLink kLink = {.bytes_per_second = 1e9};
inline const LinkRates kNetwork = {.bytes_per_second = 1e9};
inline const RingModel kModel = {.ranks_per_device = 2};
inline const SendBuffer kSend = {.peer = 1};
inline const ReceiveBuffer kReceive = {.peer = 1};

}  // namespace longspan
