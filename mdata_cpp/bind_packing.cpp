// Python bindings of packing.hpp; documented in mdata/_core.pyi.
#include "bindings.hpp"
#include "packing.hpp"

namespace {

namespace py = pybind11;

py::tuple pack_documents(const mdata::Int64s& lengths, std::int32_t row_length, std::int64_t window, std::int32_t overlap,
                         std::int32_t least) {
    const auto all = mdata::view(lengths);
    if (window < 1) throw std::invalid_argument("a window below 1");
    mdata::Packed packed;
    {
        const py::gil_scoped_release unlocked;
        const mdata::Packer packer(row_length, overlap, least);
        const auto step = static_cast<std::size_t>(window);
        for (std::size_t first = 0; first < all.size(); first += std::min(step, all.size() - first)) {
            const auto part = all.subspan(first, std::min(step, all.size() - first));
            packer.pack(part, static_cast<std::int64_t>(first), packed);
        }
    }
    return py::make_tuple(mdata::as_array(std::move(packed.row_ends)), mdata::as_array(std::move(packed.documents)),
                          mdata::as_array(std::move(packed.offsets)), mdata::as_array(std::move(packed.counts)));
}

}  // namespace

void mdata::bind_packing(py::module_& module) {
    module.def("pack_documents", &pack_documents, py::arg("lengths").noconvert(), py::arg("row_length"), py::arg("window"),
               py::arg("overlap") = 0, py::arg("least") = 1);
}
