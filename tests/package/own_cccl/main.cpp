#ifndef CONSUMER_OWN_CCCL
#error "the program was not compiled against the project's own CCCL target"
#endif

#include <penstock/units.hpp>

long standard_of_the_cu_file();

int main() { return standard_of_the_cu_file() >= 202002L && penstock::round_up(5, 4) == 8 ? 0 : 1; }
