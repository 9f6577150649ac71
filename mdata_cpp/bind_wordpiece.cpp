// The Python face of wordpiece.hpp (WordPiece); documented in mdata/_core.pyi.
#include "bindings.hpp"

void mdata::bind_wordpiece(pybind11::module_&) {}
