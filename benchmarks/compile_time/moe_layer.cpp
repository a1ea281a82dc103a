// bound: 40 s, 3000 KiB
#include <penstock/moe_layer.hpp>

template class penstock::moe_layers<penstock::executor::host, penstock::expert_store<>>;
