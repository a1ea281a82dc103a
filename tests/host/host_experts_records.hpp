#pragma once

#include <penstock/dispatch/host_experts.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

/// Random experts in every format and arrangement, and their outputs computed from the definitions in double.

namespace records {

namespace ps = penstock;

enum class arrangement { apart, concatenated, interleaved, columns, columns_concatenated, columns_interleaved, scattered };

struct shape {
    std::uint32_t hidden, intermediate;
};

inline std::uint32_t bits_of(ps::weight_kind kind) { return ps::detail::bits_of(kind); }

/// A layout whose parts have guard bytes around them and start at odd bytes if `shift` is odd.
inline ps::expert_layout make_layout(ps::weight_kind kind, shape s, arrangement how, bool biases, std::uint64_t shift = 0) {
    ps::expert_layout layout;
    layout.kind = kind;
    constexpr std::uint64_t guard = 64;
    std::uint64_t at = shift;
    const auto part = [&](std::uint64_t bytes) {
        at += guard;
        const std::uint64_t start = at;
        at += bytes;
        return start;
    };
    const auto even = [&](std::uint64_t columns) { return kind == ps::weight_kind::mxfp4 ? ps::round_up(columns, 2) : columns; };
    const std::uint64_t h = s.hidden, i = s.intermediate;
    const auto bytes = [&](std::uint64_t elements) { return (elements * bits_of(kind) + 7) / 8; };
    layout.gate.rows = layout.up.rows = layout.down.cols = s.intermediate;
    layout.gate.cols = layout.up.cols = layout.down.rows = s.hidden;
    const std::uint64_t wide = even(h), narrow = even(i);
    const bool by_columns =
        how == arrangement::columns || how == arrangement::columns_concatenated || how == arrangement::columns_interleaved;
    if (how == arrangement::apart) {
        layout.gate.offset = part(bytes(wide * i));
        layout.up.offset = part(bytes(wide * i));
        layout.gate.row_stride = layout.up.row_stride = wide;
    } else if (how == arrangement::concatenated || how == arrangement::interleaved) {
        layout.gate.offset = part(bytes(2 * wide * i));
        layout.up.offset = layout.gate.offset + bytes(how == arrangement::concatenated ? wide * i : wide);
        layout.gate.row_stride = layout.up.row_stride = how == arrangement::concatenated ? wide : 2 * wide;
    } else if (how == arrangement::columns) {
        layout.gate.offset = part(bytes(wide * i));
        layout.up.offset = part(bytes(wide * i));
        layout.gate.row_stride = layout.up.row_stride = 1;
        layout.gate.col_stride = layout.up.col_stride = i;
    } else if (how == arrangement::columns_concatenated || how == arrangement::columns_interleaved) {
        const bool together = how == arrangement::columns_concatenated;
        layout.gate.offset = part(bytes(2 * wide * i));
        layout.up.offset = layout.gate.offset + bytes(together ? i : 1);
        layout.gate.row_stride = layout.up.row_stride = together ? 1 : 2;
        layout.gate.col_stride = layout.up.col_stride = 2 * i;
    } else {  // neither stride is 1
        layout.gate.offset = part(bytes(3 * wide * i));
        layout.up.offset = part(bytes(3 * wide * i));
        layout.gate.row_stride = layout.up.row_stride = 3 * h;
        layout.gate.col_stride = layout.up.col_stride = 3;
    }
    layout.down.offset = part(bytes(h * narrow));
    layout.down.row_stride = by_columns ? 1 : narrow;
    layout.down.col_stride = by_columns ? h : 1;
    if (kind == ps::weight_kind::fp8_block128 || kind == ps::weight_kind::mxfp4) {
        const bool fp8 = kind == ps::weight_kind::fp8_block128;
        const std::uint64_t block = fp8 ? 128 : 32, unit = fp8 ? 4 : 1;
        const auto rows = [&](std::uint64_t r) { return fp8 ? ps::ceil_div(r, 128) : r; };
        layout.gate.scale_row_stride = layout.up.scale_row_stride = static_cast<std::uint32_t>(ps::ceil_div(h, block));
        layout.down.scale_row_stride = static_cast<std::uint32_t>(ps::ceil_div(i, block));
        if (how == arrangement::concatenated || how == arrangement::interleaved) {
            layout.gate.scale_offset = layout.up.scale_offset = part(rows(2 * i) * layout.gate.scale_row_stride * unit);
            layout.gate.scale_row_step = layout.up.scale_row_step = how == arrangement::interleaved ? 2 : 1;
            layout.up.scale_row0 = how == arrangement::interleaved ? 1 : s.intermediate;
        } else {
            layout.gate.scale_offset = part(rows(i) * layout.gate.scale_row_stride * unit);
            layout.up.scale_offset = part(rows(i) * layout.up.scale_row_stride * unit);
        }
        layout.down.scale_offset = part(rows(h) * layout.down.scale_row_stride * unit);
    }
    if (biases) {
        layout.gate.bias_offset = part(4 * i);  // bf16, gate and up alternating
        layout.up.bias_offset = layout.gate.bias_offset + 2;
        layout.gate.bias_stride = layout.up.bias_stride = 2;
        layout.down.bias_offset = part(4 * h);
        layout.down.bias_stride = 1;
        layout.down.bias_type = ps::dtype::f32;
    }
    layout.bytes = at + guard;
    return layout;
}

inline void put_float(std::vector<std::byte>& record, std::uint64_t offset, float value) { std::memcpy(&record[offset], &value, 4); }

/// Random weights of about 1 / sqrt(columns). What belongs to no weight, scale or bias stays 0xff: NaN in every format with NaNs.
inline std::vector<std::byte> random_record(const ps::expert_layout& layout, std::mt19937& random) {
    std::vector<std::byte> record(layout.bytes, std::byte{0xff});
    std::normal_distribution<float> normal;
    for (const ps::matrix_layout* m : {&layout.gate, &layout.up, &layout.down}) {
        const float size = 1.0f / std::sqrt(static_cast<float>(m->cols));
        const auto exponent = static_cast<std::uint64_t>(124 + std::lround(std::log2(size)));
        for (std::uint32_t r = 0; r < m->rows; ++r) {
            const std::uint64_t scale_row = std::uint64_t{r} * m->scale_row_step + m->scale_row0;
            for (std::uint32_t c = 0; c < m->cols; ++c) {
                const std::uint64_t index = r * m->row_stride + c * m->col_stride;
                switch (layout.kind) {
                    case ps::weight_kind::f32: put_float(record, m->offset + 4 * index, normal(random) * size); break;
                    case ps::weight_kind::bf16: ps::store_element(&record[m->offset], ps::dtype::bf16, index, normal(random) * size); break;
                    case ps::weight_kind::f16: ps::store_element(&record[m->offset], ps::dtype::f16, index, normal(random) * size); break;
                    case ps::weight_kind::fp8_block128: {
                        const auto bits = static_cast<std::uint8_t>(random());
                        record[m->offset + index] = static_cast<std::byte>((bits & 0x7f) == 0x7f ? 0 : bits);
                        put_float(record, m->scale_offset + 4 * (scale_row / 128 * m->scale_row_stride + c / 128),
                                  size * (0.004f + 0.0001f * static_cast<float>((scale_row / 128 * 7 + c / 128) % 16)));
                        break;
                    }
                    default: {
                        std::byte& byte = record[m->offset + index / 2];
                        const auto nibble = static_cast<std::byte>(random() % 16);
                        byte = index % 2 == 0 ? (byte & std::byte{0xf0}) | nibble : (byte & std::byte{0x0f}) | nibble << 4;
                        record[m->scale_offset + scale_row * m->scale_row_stride + c / 32] =
                            static_cast<std::byte>(exponent + (scale_row + c / 32) % 4);
                        break;
                    }
                }
            }
            if (m->bias_stride != 0) {
                ps::store_element(&record[m->bias_offset], m->bias_type, std::uint64_t{r} * m->bias_stride, normal(random));
            }
        }
    }
    return record;
}

inline double activate(const ps::expert_layout& layout, double gate, double up) {
    const double limit = layout.limit;
    if (layout.act != ps::activation::swiglu) {
        gate = std::min(gate, limit);
        up = std::min(std::max(up, -limit), limit);
    }
    if (layout.act == ps::activation::gpt_oss) {
        return gate / (1 + std::exp(-double{layout.alpha} * gate)) * (up + 1);
    }
    return gate / (1 + std::exp(-gate)) * up;
}

/// One expert applied to one row, from the definitions.
inline std::vector<double> reference(const ps::expert_layout& layout, const std::byte* record, const float* x, float input_scale = 1.0f) {
    const auto row = [&](const ps::matrix_layout& m, std::uint32_t r, const auto& input) {
        double sum = ps::bias_at(m, record, r);
        for (std::uint32_t c = 0; c < m.cols; ++c) {
            sum += static_cast<double>(ps::weight_at(layout.kind, m, record, r, c)) * input(c);
        }
        return sum;
    };
    std::vector<double> activated(layout.intermediate()), out(layout.hidden());
    const auto scaled = [&](std::uint32_t c) { return static_cast<double>(x[c] * input_scale); };
    for (std::uint32_t r = 0; r < layout.intermediate(); ++r) {
        activated[r] = activate(layout, row(layout.gate, r, scaled), row(layout.up, r, scaled));
    }
    for (std::uint32_t r = 0; r < layout.hidden(); ++r) {
        out[r] = row(layout.down, r, [&](std::uint32_t c) { return activated[c]; });
    }
    return out;
}

/// |got - wanted| / |wanted|; NaN where either holds one.
template <class Wanted>
double relative_error(const float* got, const Wanted& wanted, std::size_t n) {
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < n; ++i) {
        difference += (got[i] - wanted[i]) * (got[i] - wanted[i]);
        size += static_cast<double>(wanted[i]) * wanted[i];
    }
    return size == 0 ? std::sqrt(difference) : std::sqrt(difference / size);
}

/// Every set of loops that this machine runs.
inline std::vector<ps::host_isa> isas() {
    std::vector<ps::host_isa> result{ps::host_isa::portable};
    for (ps::host_isa isa : {ps::host_isa::avx2, ps::host_isa::avx512}) {
        if (isa <= ps::best_host_isa()) {
            result.push_back(isa);
        }
    }
    return result;
}

inline std::vector<float> random_floats(std::size_t n, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<float> result(n);
    for (float& f : result) {
        f = normal(random);
    }
    return result;
}

inline constexpr float no_number = std::numeric_limits<float>::quiet_NaN();

/// What a layer call leaves: rows of pairs that were not listed stay NaN.
struct result {
    std::vector<float> activated, partial;
};

/// Permutes and runs the experts that `ids` name; expert e's record is records[e].
inline result run_experts(const ps::executor::host& host, const ps::expert_layout& layout, const std::vector<const std::byte*>& where,
                          const std::vector<std::int32_t>& ids, std::uint32_t k, const std::vector<float>& x,
                          const float* input_scale = nullptr, bool backwards = false) {
    const auto pairs = static_cast<std::uint32_t>(ids.size());
    const auto experts = static_cast<std::uint32_t>(where.size());
    std::vector<std::int32_t> rows(pairs);
    std::vector<std::uint32_t> offsets(experts + 1);
    host.permute(ids.data(), pairs, experts, rows.data(), offsets.data(), {});
    std::vector<ps::expert_work> works;
    for (std::uint32_t n = 0; n < experts; ++n) {
        const std::uint32_t e = backwards ? experts - 1 - n : n;
        works.push_back({e, where[e], offsets[e], offsets[e + 1] - offsets[e]});
    }
    result r{std::vector<float>(std::size_t{pairs} * layout.intermediate(), no_number),
             std::vector<float>(std::size_t{pairs} * layout.hidden(), no_number)};
    host.experts(layout, works, rows.data(), k, x.data(), input_scale, r.activated.data(), r.partial.data());
    return r;
}

}  // namespace records
