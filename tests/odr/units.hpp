#pragma once

#include <penstock/error.hpp>
#include <penstock/units.hpp>

#include <cstdint>
#include <string>
#include <typeinfo>

/// What a translation unit sees of the library. All units of one program must see the same.
struct facts {
    std::uint64_t (*round_up)(std::uint64_t, std::uint64_t);
    std::string (*to_string)(penstock::bytes);
    void (*check)(cudaError_t, const char*, const cuda::std::source_location&);
    const std::type_info* stream;
    const std::type_info* ring;
    std::string computed;

    friend bool operator==(const facts& a, const facts& b) {
        return a.round_up == b.round_up && a.to_string == b.to_string && a.check == b.check && *a.stream == *b.stream &&
               *a.ring == *b.ring && a.computed == b.computed;
    }
};

facts first_host_unit();
facts second_host_unit();
facts first_device_unit();
facts second_device_unit();
[[noreturn]] void throw_from_a_unit();
