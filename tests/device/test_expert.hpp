#pragma once

#include <penstock/model/record.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

/// Experts for tests of kernels, with their true weights in float64. The bytes are made from random codes whose values are worked out here
/// from the definition of each format, not by the library's decoders.
namespace tests {

namespace ps = penstock;

/// How an expert's matrices lie in its record.
enum class arrangement {
    rows,               ///< three row-major matrices
    rows_alternate,     ///< rows of gate and up take turns in one matrix (gpt-oss)
    rows_together,      ///< rows of gate, then rows of up, in one matrix
    columns_apart,      ///< inputs first: [hidden, gate and up side by side] (Llama-4)
    columns_alternate,  ///< inputs first: [hidden, gate and up taking turns] (gpt-oss in bf16)
    rows_of_odd_pitch   ///< row-major with one element between the rows, so that nothing is aligned
};

inline const char* name(arrangement a) {
    constexpr const char* text[] = {"rows", "rows_alternate", "rows_together", "columns_apart", "columns_alternate", "rows_of_odd_pitch"};
    return text[static_cast<int>(a)];
}

struct true_matrix {
    std::uint32_t rows = 0;
    std::uint32_t cols = 0;
    std::vector<double> weight;  ///< [rows, cols]
    std::vector<double> bias;    ///< [rows]
};

struct test_expert {
    ps::expert_layout layout;
    std::vector<std::byte> record;
    true_matrix gate, up, down;
};

inline double value_of_half(std::uint16_t bits, int exponent_bits, int mantissa_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                           : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
    return bits >> (exponent_bits + mantissa_bits) & 1 ? -magnitude : magnitude;
}

inline double value_of_e2m1(unsigned nibble) {
    constexpr double magnitude[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return nibble & 8 ? -magnitude[nibble & 7] : magnitude[nibble & 7];
}

/// A code near the size `scale` would want, for a 16- or 8-bit float, and its value.
inline double random_code(ps::weight_kind kind, std::mt19937& random, std::byte* to) {
    const auto put = [&](const auto& bits) { std::memcpy(to, &bits, sizeof bits); };
    if (kind == ps::weight_kind::f32) {
        const float value = std::normal_distribution<float>(0.0f, 0.25f)(random);
        put(value);
        return value;
    }
    if (kind == ps::weight_kind::bf16) {  // exponents 2^-8 to 2^-1
        const auto bits = static_cast<std::uint16_t>((random() % 2) << 15 | (119 + random() % 8) << 7 | random() % 128);
        put(bits);
        return value_of_half(bits, 8, 7);
    }
    if (kind == ps::weight_kind::f16) {  // subnormals too
        const std::uint32_t exponent = random() % 8 == 0 ? 0 : 7 + random() % 8;
        const auto bits = static_cast<std::uint16_t>((random() % 2) << 15 | exponent << 10 | random() % 1024);
        put(bits);
        return value_of_half(bits, 5, 10);
    }
    auto bits = static_cast<std::uint8_t>(random());
    bits = (bits & 0x7f) == 0x7f ? 0x70 : bits;
    put(bits);
    return value_of_half(bits, 4, 3);
}

/// Fills matrix `m` of a record with random codes, its scales (drawn once for each scale number) and its bias.
inline true_matrix fill_matrix(ps::weight_kind kind, const ps::matrix_layout& m, std::vector<std::byte>& record, std::mt19937& random) {
    true_matrix t{m.rows, m.cols, std::vector<double>(std::size_t{m.rows} * m.cols), std::vector<double>(m.rows, 0.0)};
    for (std::uint32_t r = 0; r < m.rows; ++r) {
        const std::uint64_t scale_row = std::uint64_t{r} * m.scale_row_step + m.scale_row0;
        for (std::uint32_t c = 0; c < m.cols; ++c) {
            const std::uint64_t index = r * m.row_stride + c * m.col_stride;
            double& weight = t.weight[std::size_t{r} * m.cols + c];
            if (kind == ps::weight_kind::mxfp4) {
                const unsigned nibble = random() % 16;
                auto& byte = record[m.offset + index / 2];
                const unsigned other = std::to_integer<unsigned>(byte);
                byte = static_cast<std::byte>(index % 2 == 0 ? (other & 0xf0u) | nibble : (other & 0x0fu) | nibble << 4);
                auto& scale = record[m.scale_offset + scale_row * m.scale_row_stride + c / 32];
                if (std::to_integer<unsigned>(scale) == 0xff) {
                    scale = static_cast<std::byte>(122 + random() % 6);
                }
                weight = value_of_e2m1(nibble) * std::ldexp(1.0, std::to_integer<int>(scale) - 127);
            } else {
                const std::uint64_t size = kind == ps::weight_kind::f32 ? 4 : kind == ps::weight_kind::fp8_block128 ? 1 : 2;
                weight = random_code(kind, random, record.data() + m.offset + index * size);
                if (kind == ps::weight_kind::fp8_block128) {
                    std::byte* at = record.data() + m.scale_offset + (scale_row / 128 * m.scale_row_stride + c / 128) * 4;
                    float scale;
                    std::memcpy(&scale, at, 4);
                    if (!(scale == scale)) {
                        scale = 0.001f + 0.002f * static_cast<float>(random() % 1000) / 1000.0f;
                        std::memcpy(at, &scale, 4);
                    }
                    weight *= scale;
                }
            }
        }
        if (m.bias_stride != 0) {
            const std::uint64_t number = std::uint64_t{r} * m.bias_stride;
            if (m.bias_type == ps::dtype::f32) {
                t.bias[r] = random_code(ps::weight_kind::f32, random, record.data() + m.bias_offset + number * 4);
            } else {
                t.bias[r] = random_code(m.bias_type == ps::dtype::bf16 ? ps::weight_kind::bf16 : ps::weight_kind::f16, random,
                                        record.data() + m.bias_offset + number * 2);
            }
        }
    }
    return t;
}

struct expert_shape {
    ps::weight_kind kind = ps::weight_kind::bf16;
    std::uint32_t hidden = 0;
    std::uint32_t intermediate = 0;
    arrangement how = arrangement::rows;
    ps::activation act = ps::activation::swiglu;
    bool biases = false;
    ps::dtype bias_type = ps::dtype::bf16;
};

inline ps::expert_layout make_layout(const expert_shape& s) {
    const std::uint32_t h = s.hidden;
    const std::uint32_t i = s.intermediate;
    const std::uint64_t bits = s.kind == ps::weight_kind::mxfp4          ? 4
                               : s.kind == ps::weight_kind::fp8_block128 ? 8
                               : s.kind == ps::weight_kind::f32          ? 32
                                                                         : 16;
    ps::expert_layout l;
    l.kind = s.kind;
    l.act = s.act;
    l.limit = s.act == ps::activation::swiglu ? 0.0f : 1.5f;
    l.gate = {.rows = i, .cols = h};
    l.up = {.rows = i, .cols = h};
    l.down = {.rows = h, .cols = i};
    std::uint64_t used = 0;
    const auto place = [&](std::uint64_t bytes) {
        const std::uint64_t at = ps::layout::expert_major::next(used);
        used = at + bytes;
        return at;
    };
    const auto pitch = [&](std::uint32_t cols) -> std::uint64_t {
        const std::uint64_t whole = s.how == arrangement::rows_of_odd_pitch ? cols + 1 : cols;
        return s.kind == ps::weight_kind::mxfp4 ? ps::round_up(whole, 2) : whole;
    };
    const auto size = [&](std::uint64_t elements) { return elements * bits / 8; };
    const bool columns = s.how == arrangement::columns_apart || s.how == arrangement::columns_alternate;
    const bool alternate = s.how == arrangement::rows_alternate || s.how == arrangement::columns_alternate;
    const bool one_tensor = columns || alternate || s.how == arrangement::rows_together;
    if (columns) {
        l.gate.offset = place(size(std::uint64_t{2} * i * h));
        l.up.offset = l.gate.offset + size(alternate ? 1 : i);
        l.gate.row_stride = l.up.row_stride = alternate ? 2 : 1;
        l.gate.col_stride = l.up.col_stride = 2 * i;
        l.down.offset = place(size(std::uint64_t{i} * h));
        l.down.row_stride = 1;
        l.down.col_stride = h;
    } else {
        l.gate.offset = place(size(pitch(h) * i * (one_tensor ? 2 : 1)));
        l.up.offset = !one_tensor ? place(size(pitch(h) * i)) : l.gate.offset + size(alternate ? pitch(h) : pitch(h) * i);
        l.gate.row_stride = l.up.row_stride = pitch(h) * (alternate ? 2 : 1);
        l.down.offset = place(size(pitch(i) * h));
        l.down.row_stride = pitch(i);
    }
    if (bits <= 8) {
        const std::uint32_t across = bits == 8 ? 128 : 32;
        const std::uint64_t unit = bits == 8 ? 4 : 1;
        const auto scale_rows = [&](std::uint64_t rows) { return bits == 8 ? ps::ceil_div(rows, 128) : rows; };
        l.gate.scale_row_stride = l.up.scale_row_stride = static_cast<std::uint32_t>(ps::ceil_div(h, across));
        l.down.scale_row_stride = static_cast<std::uint32_t>(ps::ceil_div(i, across));
        if (one_tensor) {
            l.gate.scale_offset = l.up.scale_offset = place(scale_rows(2ull * i) * l.gate.scale_row_stride * unit);
            l.gate.scale_row_step = l.up.scale_row_step = alternate ? 2 : 1;
            l.up.scale_row0 = alternate ? 1 : i;
        } else {
            l.gate.scale_offset = place(scale_rows(i) * l.gate.scale_row_stride * unit);
            l.up.scale_offset = place(scale_rows(i) * l.gate.scale_row_stride * unit);
        }
        l.down.scale_offset = place(scale_rows(h) * l.down.scale_row_stride * unit);
    }
    if (s.biases) {
        const std::uint64_t unit = s.bias_type == ps::dtype::f32 ? 4 : 2;
        l.gate.bias_offset = place(2ull * i * unit);
        l.up.bias_offset = l.gate.bias_offset + (alternate ? 1 : i) * unit;
        l.gate.bias_stride = l.up.bias_stride = alternate ? 2 : 1;
        l.down.bias_offset = place(h * unit);
        l.down.bias_stride = 1;
        l.gate.bias_type = l.up.bias_type = l.down.bias_type = s.bias_type;
    }
    l.bytes = used;
    return l;
}

/// What no weight, scale or bias covers stays 0xff: NaN in every format.
inline test_expert make_expert(const expert_shape& s, std::mt19937& random) {
    test_expert e;
    e.layout = make_layout(s);
    e.record.assign(e.layout.bytes, std::byte{0xff});
    e.gate = fill_matrix(s.kind, e.layout.gate, e.record, random);
    e.up = fill_matrix(s.kind, e.layout.up, e.record, random);
    e.down = fill_matrix(s.kind, e.layout.down, e.record, random);
    return e;
}

inline double true_activation(const ps::expert_layout& l, double gate, double up) {
    const double limit = l.limit;
    if (l.act != ps::activation::swiglu) {
        gate = std::fmin(gate, limit);
        up = std::fmax(std::fmin(up, limit), -limit);
    }
    if (l.act == ps::activation::gpt_oss) {
        return gate / (1 + std::exp(-static_cast<double>(l.alpha) * gate)) * (up + 1);
    }
    return gate / (1 + std::exp(-gate)) * up;
}

inline std::vector<double> product(const true_matrix& m, const std::vector<double>& x) {
    std::vector<double> y(m.rows);
    for (std::uint32_t r = 0; r < m.rows; ++r) {
        double sum = m.bias[r];
        for (std::uint32_t c = 0; c < m.cols; ++c) {
            sum += m.weight[std::size_t{r} * m.cols + c] * x[c];
        }
        y[r] = sum;
    }
    return y;
}

/// What the expert makes of an input row, in float64.
struct true_result {
    std::vector<double> activated, partial;
};

inline true_result evaluate(const test_expert& e, const float* x, double scale) {
    std::vector<double> input(e.layout.hidden());
    for (std::uint32_t c = 0; c < e.layout.hidden(); ++c) {
        input[c] = x[c] * scale;
    }
    const std::vector<double> gate = product(e.gate, input);
    const std::vector<double> up = product(e.up, input);
    true_result result;
    result.activated.resize(gate.size());
    for (std::size_t i = 0; i < gate.size(); ++i) {
        result.activated[i] = true_activation(e.layout, gate[i], up[i]);
    }
    result.partial = product(e.down, result.activated);
    return result;
}

}  // namespace tests
