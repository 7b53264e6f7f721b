"""Native kernels for CPUs: C++ in `src/`, one copy per instruction tier, bound by ctypes."""
