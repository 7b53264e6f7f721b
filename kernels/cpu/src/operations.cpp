#include "simd.h"
