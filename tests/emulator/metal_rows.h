// Calls MLX's kernels of few rows as its library does, and prints a hash of each row's bits. The
// including text has included the kernels, and says for each call which of them takes how many rows.

// Numbers that bfloat16 holds, in float32: sums in another order then show, before they are rounded.
inline std::vector<float> numbers(size_t count, unsigned seed, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> made(count);
  for (float& each : made) each = bfloat(normal(random));
  return made;
}
inline uint3 block() { return {(uint)blockIdx.x, (uint)blockIdx.y, (uint)blockIdx.z}; }
inline uint lane() { return now % 32; }
inline uint simdgroup() { return now / 32; }
inline int over(int a, int b) { return (a + b - 1) / b; }

template <int LOW, int HIGH, class F> void with_constant(int value, F f) {
  if constexpr (LOW <= HIGH) {
    if (value == LOW) return f(std::integral_constant<int, LOW>());
    return with_constant<LOW + 1, HIGH>(value, f);
  }
  puts("a number that has no kernel");
  exit(3);
}

// The calls of 1 to `most` rows at both ends of `most` rows; `call` computes rows [first, first + n).
template <class F> void print_rows(int most, F call) {
  for (int n = 1; n <= most; ++n)
    for (int first = 0; first + n <= most; first += n == 1 ? 1 : most - n ? most - n : 1) {
      const std::vector<float> out = call(first, n);
      printf("%d %d", n, first);
      const size_t width = out.size() / n;
      for (int row = 0; row < n; ++row) {
        uint64_t hash = 14695981039346656037ull;
        for (size_t i = 0; i < width; ++i) {
          if (std::isnan(out[row * width + i])) exit(4);
          hash = (hash ^ bits_as<uint32_t>(out[row * width + i])) * 1099511628211ull;
        }
        printf(" %llx", (unsigned long long)hash);
      }
      puts("");
    }
}
