// Shared code of the bindings: arrays as spans, lists of texts as views of their UTF-8, and one function for each file
// of bindings, called by bindings.cpp. The algorithms do not depend on Python.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

namespace mdata {

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;
using Int32s = Array<std::int32_t>;
using Int64s = Array<std::int64_t>;

template <typename T>
std::span<const T> view(const Array<T>& array) {
    if (array.ndim() != 1) throw std::invalid_argument("an array of one dimension is expected");
    return {array.data(), static_cast<std::size_t>(array.size())};
}

template <typename T>
std::span<T> mutable_view(Array<T>& array) {
    return {array.mutable_data(), static_cast<std::size_t>(array.size())};
}

// A vector as an array, without a copy: the array owns it.
template <typename T>
Array<T> as_array(std::vector<T>&& values) {
    auto kept = std::make_unique<std::vector<T>>(std::move(values));
    T* data = kept->data();
    const auto size = static_cast<pybind11::ssize_t>(kept->size());
    const pybind11::capsule owner(kept.get(), [](void* p) { delete static_cast<std::vector<T>*>(p); });
    kept.release();
    return Array<T>(size, data, owner);
}

// The UTF-8 of a str, which Python keeps beside it.
// Raises TypeError for anything that is no str, UnicodeEncodeError for a lone surrogate.
inline std::string_view utf8_of(pybind11::handle text) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (data == nullptr) throw pybind11::error_already_set();
    return {data, static_cast<std::size_t>(size)};
}

// That of each text of a list. The texts are kept: another thread may change the list while the GIL is free.
class Utf8Texts {
public:
    explicit Utf8Texts(const pybind11::list& texts) : texts_(texts) {
        views_.reserve(texts_.size());
        for (const pybind11::handle text : texts_) views_.push_back(utf8_of(text));
    }

    std::size_t size() const { return views_.size(); }
    std::string_view operator[](std::size_t number) const { return views_[number]; }
    auto begin() const { return views_.begin(); }
    auto end() const { return views_.end(); }

private:
    pybind11::tuple texts_;
    std::vector<std::string_view> views_;
};

void bind_megatron_blend(pybind11::module_& module);
void bind_files(pybind11::module_& module);
void bind_fim(pybind11::module_& module);
void bind_gather(pybind11::module_& module);
void bind_masked(pybind11::module_& module);
void bind_minhash(pybind11::module_& module);
void bind_orders(pybind11::module_& module);
void bind_packing(pybind11::module_& module);
void bind_punkt(pybind11::module_& module);
void bind_sentencepiece(pybind11::module_& module);
void bind_text_rules(pybind11::module_& module);
void bind_wordpiece(pybind11::module_& module);

}  // namespace mdata
