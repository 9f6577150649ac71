// The Python face of punkt.hpp (sentence splitting); documented in mdata/_core.pyi.
#include "bindings.hpp"

void mdata::bind_punkt(pybind11::module_&) {}
