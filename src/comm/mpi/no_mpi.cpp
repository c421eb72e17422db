// Stands in for MPI where the library was built without it.
#include "longspan/communicator.h"
#include "longspan/error.h"

namespace longspan {

std::shared_ptr<Communicator> mpi_ring() {
  throw Unsupported(
      "built without MPI: install an MPI (apt-get install libopenmpi-dev) and configure with -DLONGSPAN_MPI=ON");
}

bool under_mpi() { return false; }

}  // namespace longspan
