// all_gather: every rank's bytes on every rank, or an error that names the one that is missing.
#include <gtest/gtest.h>

#include <numeric>

#include "longspan/error.h"
#include "ring/ring_cases.h"

namespace longspan::testing {
namespace {

using Bytes = std::vector<unsigned char>;

Bytes of_rank(int rank, std::size_t bytes) {
  Bytes data(bytes);
  std::iota(data.begin(), data.end(), static_cast<unsigned char>(10 * rank));
  return data;
}

std::vector<Bytes> gather(Communicator& communicator, const std::vector<std::size_t>& sizes, const std::string& what,
                          std::chrono::milliseconds deadline = std::chrono::seconds(20)) {
  const Bytes own = of_rank(communicator.rank(), sizes[static_cast<std::size_t>(communicator.rank())]);
  std::vector<Bytes> parts;
  std::vector<ReceiveBuffer> into;
  for (const std::size_t size : sizes) parts.emplace_back(size);
  for (Bytes& part : parts) into.push_back({0, part.data(), part.size(), {}});
  all_gather(communicator, what, {0, own.data(), own.size(), {}}, into, deadline);
  return parts;
}

TEST(AllGather, EveryRankHasTheBytesOfAll) {
  for (const int ranks : {1, 2, 5}) {
    std::vector<std::size_t> sizes{3, 0, 1000, 70, 1};
    sizes.resize(static_cast<std::size_t>(ranks));
    const auto errors = on_ranks(local_ring(ranks), [&](int, std::shared_ptr<Communicator> communicator) {
      for (int turn = 0; turn < 3; ++turn) {
        const std::vector<Bytes> parts = gather(*communicator, sizes, "bytes");
        for (int rank = 0; rank < ranks; ++rank) {
          const auto index = static_cast<std::size_t>(rank);
          EXPECT_EQ(parts[index], of_rank(rank, sizes[index]));
        }
      }
    });
    for (const std::string& error : texts_of<CommError>(errors)) EXPECT_EQ(error, "");
  }
}

TEST(AllGather, AMissingRankIsNamedWithTheStep) {
  const auto communicators = local_ring(3, {{LocalFault::Kind::lose, 1, -1, 1}});
  const auto errors = on_ranks(communicators, [&](int, std::shared_ptr<Communicator> communicator) {
    gather(*communicator, {4, 4, 4}, "first");
    gather(*communicator, {4, 4, 4}, "second", std::chrono::milliseconds(500));
  });
  const auto texts = texts_of<CommError>(errors);
  for (const std::size_t rank : {0u, 2u}) {
    EXPECT_NE(texts[rank].find("second (step 1)"), std::string::npos) << texts[rank];
    EXPECT_NE(texts[rank].find("rank 1"), std::string::npos) << texts[rank];
    EXPECT_THROW(gather(*communicators[rank], {4, 4, 4}, "third"), CommError);
  }
}

TEST(AllGather, RanksThatAskForOtherThingsAreTold) {
  const auto errors = on_ranks(local_ring(2), [&](int rank, std::shared_ptr<Communicator> communicator) {
    gather(*communicator, {4, 4}, rank == 0 ? "lengths" : "masks");
  });
  for (const std::string& text : texts_of<CommError>(errors))
    EXPECT_NE(text.find("computes something else"), std::string::npos) << text;
}

TEST(AllGather, WrongPartsAreRefusedBeforeAnyMessage) {
  const auto ring = local_ring(2);
  EXPECT_THROW(gather(*ring[0], {4}, "one part"), InvalidArgument);
  const Bytes own(3);
  Bytes part(4);
  const std::vector<ReceiveBuffer> into(2, ReceiveBuffer{0, part.data(), part.size(), {}});
  EXPECT_THROW(all_gather(*ring[0], "own size", {0, own.data(), own.size(), {}}, into, std::chrono::seconds(1)),
               InvalidArgument);
  EXPECT_EQ(ring[0]->failure(), "");
}

}  // namespace
}  // namespace longspan::testing
