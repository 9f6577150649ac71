// Python bindings of file_map.hpp and file_pool.hpp; documented in mdata/_core.pyi.
#include <pybind11/stl.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>

#include "bindings.hpp"
#include "file_map.hpp"
#include "file_pool.hpp"

namespace {

namespace py = pybind11;
using mdata::FilePool;
using mdata::PooledFile;
using Identity = std::tuple<std::uint64_t, std::uint64_t, std::int64_t, std::int64_t>;

mdata::FileIdentity identity_of(const Identity& parts) {
    return {std::get<0>(parts), std::get<1>(parts), std::get<2>(parts), std::get<3>(parts)};
}

// What `action` returns, without the GIL; an error of the system as an OSError of this file.
template <typename Action>
auto without_gil(const std::string& path, Action action) {
    try {
        const py::gil_scoped_release unlocked;
        return action();
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
        throw py::error_already_set();
    }
}

mdata::Array<std::uint8_t> map_file(const py::bytes& path, const std::optional<Identity>& identity) {
    const std::string name = path;
    const auto expected = identity ? std::optional(identity_of(*identity)) : std::nullopt;
    auto map = without_gil(name, [&] { return std::make_unique<mdata::FileMap>(name.c_str(), expected); });
    const auto bytes = map->bytes();
    const py::capsule owner(map.release(), [](void* held) { delete static_cast<mdata::FileMap*>(held); });
    mdata::Array<std::uint8_t> array(bytes.size(), bytes.data(), owner);
    array.attr("setflags")(py::arg("write") = false);
    return array;
}

std::shared_ptr<PooledFile> make_file(std::shared_ptr<FilePool> pool, const py::bytes& path, const Identity& identity) {
    return std::make_shared<PooledFile>(std::move(pool), path, identity_of(identity));
}

py::bytes read_bytes(PooledFile& self, std::int64_t start, std::size_t count) {
    if (start < 0) throw std::invalid_argument("a byte before the file");
    std::string found(count, '\0');
    const std::size_t got = without_gil(
        self.path(), [&] { return self.use()->read(std::as_writable_bytes(std::span(found)), start); });
    return {found.data(), got};
}

}  // namespace

void mdata::bind_files(py::module_& module) {
    module.def("map_file", &map_file, py::arg("path"), py::arg("identity") = py::none());
    py::class_<FilePool, std::shared_ptr<FilePool>>(module, "FilePool")
        .def(py::init<std::size_t>(), py::arg("most") = 0)
        .def("most", &FilePool::most)
        .def("num_open", &FilePool::num_open);
    py::class_<PooledFile, std::shared_ptr<PooledFile>>(module, "PooledFile")
        .def(py::init(&make_file), py::arg("pool"), py::arg("path"), py::arg("identity"))
        .def("read", &read_bytes, py::arg("start"), py::arg("count"));
}
