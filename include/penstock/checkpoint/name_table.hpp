#pragma once

#include <penstock/model/tensor.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

/// Tensors by their names.

namespace penstock::inline v0_1::detail {

/// Finds the tensors of a list by name. It knows their positions and no names, so that every call brings the list, and a copy serves a
/// copy of the list. One allocation and 16 to 32 bytes a tensor: a map of strings would copy each name, and visit memory once more a
/// look-up.
class name_table {
public:
    name_table() = default;

    /// Room for `names` names.
    explicit name_table(std::size_t names) : slots_(std::bit_ceil(2 * names + 1), empty) {}

    /// Adds list[position]. At most as many names may be added as there is room for.
    /// @return the position of a tensor of that name that was added before, or nothing
    std::optional<std::size_t> add(std::span<const tensor_info> list, std::size_t position) {
        const std::string_view name = list[position].name;
        const std::uint64_t hash = hash_of(name);
        std::uint64_t& slot = slots_[slot_of(list, name, hash)];
        if (slot != empty) {
            return slot & position_mask;
        }
        slot = (hash & ~position_mask) | position;
        return std::nullopt;
    }

    /// The position of the tensor of that name, or nothing.
    [[nodiscard]] std::optional<std::size_t> find(std::span<const tensor_info> list, std::string_view name) const {
        if (slots_.empty()) {
            return std::nullopt;
        }
        const std::uint64_t slot = slots_[slot_of(list, name, hash_of(name))];
        return slot == empty ? std::nullopt : std::optional<std::size_t>(slot & position_mask);
    }

private:
    /// A slot holds a position and, above it, that part of the hash that did not choose the slot: names are compared where both agree.
    static constexpr std::uint64_t position_mask = (std::uint64_t{1} << 40) - 1;
    static constexpr std::uint64_t empty = ~std::uint64_t{0};

    static std::uint64_t hash_of(std::string_view name) noexcept { return std::hash<std::string_view>{}(name); }

    /// The slot of that name, or the empty one where it would be put.
    [[nodiscard]] std::size_t slot_of(std::span<const tensor_info> list, std::string_view name, std::uint64_t hash) const {
        std::size_t at = hash & (slots_.size() - 1);
        while (slots_[at] != empty && ((slots_[at] ^ hash) > position_mask || list[slots_[at] & position_mask].name != name)) {
            at = (at + 1) & (slots_.size() - 1);
        }
        return at;
    }

    std::vector<std::uint64_t> slots_;  ///< a power of 2, at most half of them taken
};

}  // namespace penstock::inline v0_1::detail
