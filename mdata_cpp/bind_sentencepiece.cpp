// The Python face of sentencepiece.hpp (SentencePiece); documented in mdata/_core.pyi.
#include "bindings.hpp"

void mdata::bind_sentencepiece(pybind11::module_&) {}
