// Loads every kernel on a GPU and runs those that hand rows on.
#ifndef JAX_EP_CC_SELF_TEST_H_
#define JAX_EP_CC_SELF_TEST_H_

#include <string>

namespace jax_ep {

// Runs plan, dispatch, plan_dispatch, combine, expert_rows and dispatch_permute
// on GPU `ordinal` with one rank and checks the rows. Returns what is wrong in
// words, or "" where nothing is. Allocates and synchronises: for set-up only. A
// kernel that is first loaded later would deadlock behind one that waits for
// it.
std::string SelfTest(int ordinal);

// What the kernels were compiled for, in CMake's words: "90a-real, ...".
const char* Architectures();

// Whether GPU `ordinal` has bulk copies and kBulkSharedBytes for them.
bool HasBulk(int ordinal);

}  // namespace jax_ep

#endif  // JAX_EP_CC_SELF_TEST_H_
