// The Python face of mapping.hpp; documented in mdata/_core.pyi.
#include "bindings.hpp"
#include "mapping.hpp"

namespace {

namespace py = pybind11;
using mdata::Int32s;
using mdata::Int64s;
using mdata::MappingRule;
using mdata::view;

template <typename T>
py::object as_rows(std::vector<mdata::MappingRow<T>>&& rows) {
    static_assert(sizeof(mdata::MappingRow<T>) == 3 * sizeof(T));
    auto kept = std::make_unique<std::vector<mdata::MappingRow<T>>>(std::move(rows));
    const auto shape = std::vector<py::ssize_t>{static_cast<py::ssize_t>(kept->size()), 3};
    auto* data = reinterpret_cast<T*>(kept->data());
    using Kept = std::vector<mdata::MappingRow<T>>;
    const py::capsule owner(kept.release(), [](void* p) { delete static_cast<Kept*>(p); });
    return mdata::Array<T>(shape, data, owner);
}

MappingRule checked(std::int64_t longest, std::uint64_t short_ratio, std::int64_t least_sentences) {
    if (longest < 2 || longest > 0x7FFFFFFF || least_sentences < 1) {
        throw std::invalid_argument("a target below 2 or above 2^31 - 1, or samples of no sentence");
    }
    return {longest, short_ratio, least_sentences};
}

// Rows of 32 bits, or of 64 where sentences need them.
template <typename Map>
py::object mapped(const Int32s& sizes, Map&& map) {
    const auto run = [&]<typename T>(T) {
        std::vector<mdata::MappingRow<T>> rows;
        {
            const py::gil_scoped_release unlocked;
            rows = map(T{});
        }
        return as_rows(std::move(rows));
    };
    return view(sizes).size() > 0xFFFFFFFFU ? run(std::uint64_t{}) : run(std::uint32_t{});
}

py::object in_megatrons_form(const Int64s& boundaries, const Int32s& sizes, std::int64_t longest,
                            std::uint64_t short_ratio, std::int64_t least_sentences, std::uint64_t epochs,
                            std::uint64_t limit, std::uint32_t seed) {
    const MappingRule rule = checked(longest, short_ratio, least_sentences);
    return mapped(sizes, [&, documents = view(boundaries), inside = view(sizes)]<typename T>(T) {
        return mdata::megatron_mapping<T>(rule, documents, inside, epochs, limit, seed);
    });
}

py::object in_keyed_form(const Int64s& boundaries, const Int32s& sizes, std::int64_t longest, std::uint64_t short_ratio,
                         std::int64_t least_sentences, std::uint64_t key_low, std::uint64_t key_high,
                         std::uint64_t first_document) {
    const MappingRule rule = checked(longest, short_ratio, least_sentences);
    return mapped(sizes, [&, documents = view(boundaries), inside = view(sizes)]<typename T>(T) {
        return mdata::keyed_mapping<T>(rule, documents, inside, {key_low, key_high}, first_document);
    });
}

}  // namespace

void mdata::bind_masked(py::module_& module) {
    module.def("megatron_mapping", &in_megatrons_form, py::arg("boundaries").noconvert(), py::arg("sizes").noconvert(),
               py::arg("longest"), py::arg("short_ratio"), py::arg("least_sentences"), py::arg("epochs"),
               py::arg("limit"), py::arg("seed"));
    module.def("keyed_mapping", &in_keyed_form, py::arg("boundaries").noconvert(), py::arg("sizes").noconvert(),
               py::arg("longest"), py::arg("short_ratio"), py::arg("least_sentences"), py::arg("key_low"),
               py::arg("key_high"), py::arg("first_document"));
}
