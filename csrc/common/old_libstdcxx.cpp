/* What headers of newer compilers ask of libstdc++ beyond what glibc 2.28's systems have of it (GLIBCXX_3.4.25): our own
   copies, seen by this binary alone, so that it loads wherever torch's own wheels do. */
#include <new>
#include <sstream>

#define CAMOX_OWN(symbol) __asm__(symbol) __attribute__((visibility("hidden")))

extern "C" {
[[noreturn]] void camox_throw_bad_array_new_length() CAMOX_OWN("_ZSt28__throw_bad_array_new_lengthv");
void camox_stringstream(void *at) CAMOX_OWN("_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void camox_ostringstream(void *at) CAMOX_OWN("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");

void camox_throw_bad_array_new_length() { throw std::bad_array_new_length(); }
void camox_stringstream(void *at) { new (at) std::stringstream(std::ios_base::in | std::ios_base::out); }
void camox_ostringstream(void *at) { new (at) std::ostringstream(std::ios_base::out); }
}
