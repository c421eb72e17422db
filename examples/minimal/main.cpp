// Dilated attention in one call. Build it against an installed Longspan:
//   c++ -std=c++20 main.cpp $(pkg-config --cflags --libs longspan) -o minimal
#include <longspan/longspan.h>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t batch = 1, tokens = 4096, heads = 8, head_dim = 64;
  const std::size_t elements = batch * tokens * heads * head_dim;
  std::vector<float> q(elements), k(elements), v(elements), out(elements);
  for (std::size_t i = 0; i < elements; ++i) {
    q[i] = std::sin(0.37f * static_cast<float>(i % 10007));
    k[i] = std::cos(0.11f * static_cast<float>(i % 10009));
    v[i] = std::sin(0.05f * static_cast<float>(i % 10037) + 1.0f);
  }
  const auto view = [&](std::vector<float>& data) {
    return longspan::TensorView::bnhd(data.data(), longspan::DType::f32, batch, tokens, heads, head_dim);
  };

  const auto pattern = longspan::Pattern::dilated({512, 1024, 2048}, {1, 2, 4});
  const longspan::Attention attention(pattern, {.causal = true});
  attention.forward(view(q), view(k), view(v), view(out));

  double sum = 0;
  for (float value : out) sum += std::abs(value);
  std::printf("longspan %s, %s\n", LONGSPAN_VERSION, pattern.to_string().c_str());
  std::printf("mean |out| = %.4f\n", sum / static_cast<double>(elements));
  std::printf("the first token sees only itself: out = %.6f, v = %.6f\n", out[0], v[0]);
}
