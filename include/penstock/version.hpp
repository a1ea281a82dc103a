#pragma once

/// The version of the headers; `project(VERSION)` in CMakeLists.txt is held against it by a test.
#define PENSTOCK_VERSION_MAJOR 0
#define PENSTOCK_VERSION_MINOR 1
#define PENSTOCK_VERSION_PATCH 0
