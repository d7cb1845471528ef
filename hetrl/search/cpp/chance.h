// Random numbers: one word of state, so that a seed fixes a whole search.
#pragma once

#include "array.h"

// Return a number in [0, 1): xorshift64* (Vigna, arXiv 1402.6246). A state of 0 would stay 0.
inline double uniform(const Hashes& state) {
    Word bits = state[0];
    bits ^= bits >> 12;
    bits ^= bits << 25;
    bits ^= bits >> 27;
    state[0] = bits;
    return double((bits * 2685821657736338717ULL) >> 11) / 9007199254740992.0;
}

// Return an integer in 0 .. limit - 1.
inline Int below(const Hashes& state, Int limit) {
    return Int(uniform(state) * double(limit));
}
