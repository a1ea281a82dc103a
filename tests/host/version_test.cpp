#include <penstock/version.hpp>

#include <doctest/doctest.h>

#include <string>

TEST_CASE("the headers and the package carry the same version") {
    const std::string headers = std::to_string(PENSTOCK_VERSION_MAJOR) + "." + std::to_string(PENSTOCK_VERSION_MINOR) + "." +
                                std::to_string(PENSTOCK_VERSION_PATCH);
    CHECK(headers == PENSTOCK_PROJECT_VERSION);
}
