#include "everything.cuh"
#include "look.hpp"

facts first_device_unit() { return look(); }
