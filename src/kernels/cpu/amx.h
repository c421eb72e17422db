// Permission to use AMX tiles, which Linux gives on request only.
#pragma once

namespace longspan::cpu {

/// Asks once per process; false if the system has none or refuses.
bool amx_permitted();

}  // namespace longspan::cpu
