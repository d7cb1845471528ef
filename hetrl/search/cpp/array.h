// Arrays whose memory is numpy's, rows of them, and small workspaces.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>

using Int = std::int64_t;
using Word = std::uint64_t;

constexpr double INFINITE = std::numeric_limits<double>::infinity();

// Ends the program where an index is out of range, in a build with -DHETRL_CHECKED only.
inline void check_index([[maybe_unused]] Int index, [[maybe_unused]] Int size) {
#ifdef HETRL_CHECKED
    if (index < 0 || index >= size) {
        std::fprintf(stderr, "index %lld is out of range, size %lld\n", (long long)index, (long long)size);
        std::abort();
    }
#endif
}

// A C-contiguous array of N dimensions; `a[i]` is its row i, and an element where there is one dimension. The fields
// are those of `hetrl.search.core.records`.
template <class T, int N>
struct Array {
    T* data;
    Int sizes[N];

    Int size() const { return sizes[0]; }

    decltype(auto) operator[](Int index) const {
        check_index(index, sizes[0]);
        if constexpr (N == 1) {
            return (data[index]);
        } else {
            Array<T, N - 1> row;
            Int stride = 1;
            for (int d = 1; d < N; ++d) {
                row.sizes[d - 1] = sizes[d];
                stride *= sizes[d];
            }
            row.data = data + index * stride;
            return row;
        }
    }

    T* begin() const { return data; }

    T* end() const {
        Int length = 1;
        for (int d = 0; d < N; ++d) {
            length *= sizes[d];
        }
        return data + length;
    }
};

using Ints = Array<Int, 1>;
using Floats = Array<double, 1>;
using Genes = Array<std::int32_t, 1>;
using Genes2 = Array<std::int32_t, 2>;
using Flags = Array<bool, 1>;
using Hashes = Array<Word, 1>;

template <class T, int N>
void fill(const Array<T, N>& array, T value) {
    std::fill(array.begin(), array.end(), value);
}

// Both have the same length.
template <class T, int N>
void copy(const Array<T, N>& from, const Array<T, N>& to) {
    std::copy(from.begin(), from.end(), to.begin());
}

template <class T>
T sum(const Array<T, 1>& array, Int count) {
    T total = 0;
    for (Int n = 0; n < count; ++n) {
        total += array[n];
    }
    return total;
}

// Return the first so many elements.
template <class T>
Array<T, 1> head(const Array<T, 1>& array, Int count) {
    check_index(count, array.size() + 1);
    return {array.data, {count}};
}

inline Int clamp(Int value, Int least, Int most) {
    return std::min(std::max(value, least), most);
}

// An array that lives as long as its block; few elements need no allocation.
template <class T>
class Local {
  public:
    Local(Int size, T value) : size_(size) {
        if (size > FEW) {
            many_ = std::make_unique<T[]>(size);
        }
        std::fill(data(), data() + size, value);
    }

    T& operator[](Int index) {
        check_index(index, size_);
        return data()[index];
    }

    Array<T, 1> all() { return {data(), {size_}}; }

    T* begin() { return data(); }
    T* end() { return data() + size_; }

  private:
    static constexpr Int FEW = 32;

    T* data() { return many_ ? many_.get() : few_; }

    Int size_;
    T few_[FEW];
    std::unique_ptr<T[]> many_;
};
