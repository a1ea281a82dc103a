#include "everything.hpp"
#include "look.hpp"

facts first_host_unit() { return look(); }
