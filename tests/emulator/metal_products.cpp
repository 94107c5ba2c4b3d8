// argv: format, inputs, outputs, whether one row and more have kernels of their own, rows
#include "metal.h"
#include "quantized.h"
#include "fp4.h"
#include "fp8.h"
namespace fp {  // has names of the former
#include "fp_quantized.h"
}
#include "metal_rows.h"

int inputs, outputs;
bool has_wide;

template <int GROUP, int BITS> struct Affine {
  std::vector<uint32_t> weights = std::vector<uint32_t>((size_t)inputs * outputs * BITS / 32);
  std::vector<float> scales, biases;
  Affine() {
    std::mt19937 random(1);
    for (auto& each : weights) each = random();
    scales = numbers((size_t)inputs * outputs / GROUP, 2, 0.01f);
    for (float scale : scales) biases.push_back(bfloat(-scale * (1 << (BITS - 1))));
  }
  bool is_fast() const { return outputs % 8 == 0 && inputs % (BITS == 4 ? 512 : 256) == 0; }
  void few(const float* x, float* y, int rows) {
    const auto w = weights.data();
    const auto s = scales.data(), b = biases.data();
    if (inputs == 128 || (inputs == 64 && rows > 1))
      launch({rows, over(outputs, 64), 1}, 32, [&] {
        if (inputs == 128)
          qmv_quad_impl<float, GROUP, BITS, 128>(w, s, b, x, y, inputs, outputs, block(), now / 4, now % 4);
        else
          qmv_quad_impl<float, GROUP, BITS, 64>(w, s, b, x, y, inputs, outputs, block(), now / 4, now % 4);
      });
    else
      launch({rows, over(outputs, 8), 1}, 64, [&] {
        if (is_fast())
          qmv_fast_impl<float, GROUP, BITS>(w, s, b, x, y, inputs, outputs, block(), simdgroup(), lane());
        else
          qmv_impl<float, GROUP, BITS>(w, s, b, x, y, inputs, outputs, block(), simdgroup(), lane());
      });
  }
  template <int TILE> void wide(const float* x, float* y, int rows) {
    launch({over(rows, TILE), over(outputs, 8), 1}, 64, [&] {
      qmv_wide_impl<float, GROUP, BITS, TILE, 8>(weights.data(), scales.data(), biases.data(), x, y,
                                                 inputs, outputs, rows, block(), simdgroup(), lane());
    });
  }
  static bool has_quad() { return inputs == 128 || inputs == 64; }
};

template <int GROUP, int BITS> struct Float {
  std::vector<uint32_t> weights = std::vector<uint32_t>((size_t)inputs * outputs * BITS / 32);
  std::vector<uint8_t> scales = std::vector<uint8_t>((size_t)inputs * outputs / GROUP);
  Float() {
    std::mt19937 random(1);
    for (auto& each : weights) each = BITS == 8 ? random() & 0x77777777 : random();
    for (auto& each : scales) each = GROUP == 16 ? 0x20 + random() % 32 : 118 + random() % 6;
  }
  void few(const float* x, float* y, int rows) {
    const bool is_fast = outputs % 8 == 0 && inputs % (BITS == 4 ? 512 : 256) == 0;
    launch({rows, over(outputs, 8), 1}, 64, [&] {
      if (is_fast)
        fp::fp_qmv_fast_impl<float, GROUP, BITS, false, false, 4>(
            weights.data(), scales.data(), nullptr, x, y, inputs, outputs, block(), simdgroup(), lane());
      else
        fp::fp_qmv_impl<float, GROUP, BITS, false>(weights.data(), scales.data(), nullptr, x, y, inputs,
                                               outputs, block(), simdgroup(), lane());
    });
  }
  template <int TILE> void wide(const float* x, float* y, int rows) {
    launch({over(rows, TILE), over(outputs, 4), 1}, 64, [&] {
      fp::fp_qmv_wide_impl<float, GROUP, BITS, TILE, 16>(weights.data(), scales.data(), x, y, inputs,
                                                     outputs, rows, block(), simdgroup(), lane());
    });
  }
  static bool has_quad() { return false; }
};

template <class Format> void print_products(int most) {
  Format format;
  const std::vector<float> x = numbers((size_t)most * inputs, 3);
  print_rows(most, [&](int first, int rows) {
    std::vector<float> y((size_t)rows * outputs, NAN);
    const float* from = x.data() + (size_t)first * inputs;
    if (rows == 1 || !has_wide || Format::has_quad())
      format.few(from, y.data(), rows);
    else
      with_constant<2, 5>(over(rows, over(rows, 5)), [&](auto tile) {
        format.template wide<decltype(tile)::value>(from, y.data(), rows);
      });
    return y;
  });
}

int main(int, char** argv) {
  const std::string format = argv[1];
  inputs = atoi(argv[2]);
  outputs = atoi(argv[3]);
  has_wide = atoi(argv[4]);
  const int most = atoi(argv[5]);
  if (format == "affine-32-4") print_products<Affine<32, 4>>(most);
  else if (format == "affine-64-4") print_products<Affine<64, 4>>(most);
  else if (format == "affine-128-4") print_products<Affine<128, 4>>(most);
  else if (format == "affine-32-8") print_products<Affine<32, 8>>(most);
  else if (format == "affine-64-8") print_products<Affine<64, 8>>(most);
  else if (format == "affine-64-6") print_products<Affine<64, 6>>(most);
  else if (format == "mxfp4-32-4") print_products<Float<32, 4>>(most);
  else if (format == "nvfp4-16-4") print_products<Float<16, 4>>(most);
  else if (format == "mxfp8-32-8") print_products<Float<32, 8>>(most);
  else return 5;
}
