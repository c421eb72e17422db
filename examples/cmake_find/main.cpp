// Forward and backward of LongNet attention on bfloat16 tensors stored [batch, heads, rows, columns].
#include <longspan/longspan.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

// bfloat16 is the upper half of a float; rounding to nearest does not matter for this example.
std::uint16_t to_bf16(float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); }
float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

}  // namespace

int main() {
  using namespace longspan;
  const std::int64_t tokens = 1000, heads = 4, head_dim = 48;  // no power of two anywhere: nothing needs padding
  const std::size_t elements = static_cast<std::size_t>(tokens * heads * head_dim);
  using Tensor = std::vector<std::uint16_t>;
  Tensor q(elements), k(elements), v(elements), out(elements), dout(elements), dq(elements), dk(elements), dv(elements);
  std::vector<float> lse(static_cast<std::size_t>(tokens * heads));
  for (std::size_t i = 0; i < elements; ++i) {
    q[i] = to_bf16(std::sin(0.3f * static_cast<float>(i % 1009)));
    k[i] = to_bf16(std::cos(0.2f * static_cast<float>(i % 1013)));
    v[i] = to_bf16(static_cast<float>(i % 7) - 3.0f);
    dout[i] = to_bf16(1.0f);
  }
  const auto view = [&](Tensor& data) {
    return TensorView::bhnd(data.data(), DType::bf16, 1, tokens, heads, head_dim);
  };
  const auto lse_view = TensorView::lse(lse.data(), 1, tokens, heads);

  try {
    const Attention attention(Pattern::longnet({128, 512}, {1, 3}));
    attention.forward(view(q), view(k), view(v), view(out), lse_view);
    attention.backward(view(q), view(k), view(v), view(out), lse_view, view(dout), view(dq), view(dk), view(dv));
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }

  // Every weight of a row sums to one, and dout is all ones, so dv must sum to the number of elements of out.
  double sum = 0;
  for (std::uint16_t bits : dv) sum += from_bf16(bits);
  std::printf("sum of dv = %.0f of %zu\n", sum, elements);
  return std::abs(sum / static_cast<double>(elements) - 1.0) < 0.01 ? 0 : 1;
}
