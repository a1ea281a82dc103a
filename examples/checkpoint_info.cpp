/// Lists the tensors of a checkpoint, with a digest of their bytes if asked.
///
///     checkpoint_info PATH [--json] [--digest]
///
/// Exit 0, or 2 with the reason on standard error and nothing on standard output.

#include <penstock/checkpoint/checkpoint.hpp>
#include <penstock/stream/weight_stream.hpp>

#include <cstdio>
#include <iostream>
#include <sstream>

namespace ps = penstock;
using namespace ps::literals;

/// Streams tensors through a window of host memory, whatever their size.
class digester {
public:
    explicit digester(const ps::tensor_list& list) : source_(list.files), window_(32_MiB) {}

    /// FNV-1a 64 of a tensor's bytes, as 16 hex digits.
    std::string operator()(const ps::tensor_info& tensor) {
        std::uint64_t hash = 0xcbf29ce484222325;
        for (std::uint64_t done = 0; done < tensor.bytes; done += window_.size()) {
            const std::uint64_t bytes = std::min<std::uint64_t>(window_.size(), tensor.bytes - done);
            ps::transfer part{};
            part.file = tensor.file;
            part.offset = tensor.offset + done;
            part.bytes = bytes;
            part.destination = window_.data();
            stream_.run(std::span(&part, 1), source_, ps::on_host());
            for (const std::byte b : std::span(window_).first(bytes)) {
                hash = (hash ^ std::to_integer<std::uint64_t>(b)) * 0x100000001b3;
            }
        }
        char text[17];
        std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
        return text;
    }

private:
    ps::file_source source_;
    ps::weight_stream<> stream_{};
    std::vector<std::byte> window_;
};

int main(int argc, char** argv) {
    std::string path;
    bool json = false, digest = false;
    for (int i = 1; i < argc; ++i) {
        const std::string_view word = argv[i];
        json = json || word == "--json";
        digest = digest || word == "--digest";
        if (!word.starts_with("--")) {
            path = word;
        } else if (word != "--json" && word != "--digest") {
            path.clear();
            break;
        }
    }
    if (path.empty()) {
        std::cerr << "usage: checkpoint_info PATH [--json] [--digest]\n";
        return 2;
    }
    try {
        const ps::checkpoint weights = ps::checkpoint::open(path);
        std::optional<digester> hash;
        if (digest) {
            hash.emplace(weights.all());
        }
        std::ostringstream lines;  // printed when nothing can go wrong any more
        nlohmann::json tensors = nlohmann::json::array();
        for (const ps::tensor_info& t : weights.all().tensors) {
            const std::string file = weights.all().files[t.file].string(), sum = hash ? (*hash)(t) : "";
            if (json) {
                nlohmann::json entry{{"name", t.name}, {"dtype", ps::name(t.type)}, {"shape", t.shape}, {"file", file}};
                entry.update({{"offset", t.offset}, {"bytes", t.bytes}});
                if (hash) {
                    entry["digest"] = sum;
                }
                tensors.push_back(std::move(entry));
            } else {
                lines << nlohmann::json(t.name) << ' ' << ps::name(t.type) << ' ' << nlohmann::json(t.shape) << ' '
                      << ps::to_string(ps::bytes{t.bytes}) << ' ' << file << " at " << t.offset << ' ' << sum << '\n';
            }
        }
        for (const std::filesystem::path& file : weights.unreferenced_files()) {
            lines << "not read, the index leaves it out: " << file.string() << '\n';
        }
        std::cout << (json ? nlohmann::json{{"tensors", tensors}}.dump() + '\n' : lines.str());
    } catch (const std::exception& problem) {
        std::cerr << "checkpoint_info: " << problem.what() << '\n';
        return 2;
    }
    return 0;
}
