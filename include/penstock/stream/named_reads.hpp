#pragma once

#include <penstock/stream/byte_source.hpp>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>

namespace penstock::inline v0_1::detail {

/// A source whose errors say what was being read: `what(file, offset)`, the tensor or expert that a byte of a file belongs to.
class named_reads final : public byte_source {
public:
    using namer = std::function<std::string(std::uint32_t file, std::uint64_t offset)>;

    /// Both outlive this.
    named_reads(byte_source& from, namer what) : from_(from), what_(std::move(what)) {}

    void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) override {
        naming(file, offset, [&] { from_.read(file, offset, into); });
    }
    void read_pieces(std::uint32_t file, std::span<const read_piece> pieces) override {
        naming(file, pieces.empty() ? 0 : pieces.front().offset, [&] { from_.read_pieces(file, pieces); });
    }
    [[nodiscard]] std::string name(std::uint32_t file) const override { return from_.name(file); }
    [[nodiscard]] std::string condition(std::uint32_t file) const override { return from_.condition(file); }
    [[nodiscard]] std::uint32_t reads_at_a_time(std::uint32_t file) const noexcept override { return from_.reads_at_a_time(file); }
    [[nodiscard]] std::uint64_t chunk_bytes(std::uint32_t file) const noexcept override { return from_.chunk_bytes(file); }
    [[nodiscard]] std::uint64_t size(std::uint32_t file) override { return from_.size(file); }
    [[nodiscard]] bytes_in_place in_place(std::uint32_t file, std::uint64_t offset, std::uint64_t bytes) override {
        return from_.in_place(file, offset, bytes);
    }
    void refuse_in_place(std::uint32_t file, const std::string& why) override { from_.refuse_in_place(file, why); }

private:
    template <class Read>
    void naming(std::uint32_t file, std::uint64_t offset, Read&& read) {
        try {
            read();
        } catch (const read_error& e) {
            throw read_error(text(e, file, e.at()), e.at());
        } catch (const io_error& e) {
            throw io_error(text(e, file, offset));
        }
    }

    [[nodiscard]] std::string text(const io_error& e, std::uint32_t file, std::uint64_t offset) const {
        const std::string what = what_(file, offset);
        return what.empty() ? e.what() : std::string(e.what()) + " (in " + what + ")";
    }

    byte_source& from_;
    namer what_;
};

}  // namespace penstock::inline v0_1::detail
