// FFI handlers and state types of a native module. Each registers itself by an
// object beside it; the module hands all of them to Python.
#ifndef JAX_EP_XLA_FFI_HANDLERS_H_
#define JAX_EP_XLA_FFI_HANDLERS_H_

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// Static objects of T make a list, in no order.
template <typename T>
class Registered {
 public:
  static const std::vector<const T*>& All() { return List(); }

 protected:
  explicit Registered(const T* object) { List().push_back(object); }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;

 private:
  static std::vector<const T*>& List() {
    static std::vector<const T*> list;
    return list;
  }
};

// An FFI target. `instantiate` is nullptr where call sites have no state.
struct HandlerRegistration : Registered<HandlerRegistration> {
  HandlerRegistration(const char* target_name, XLA_FFI_Handler* execute_call,
                      XLA_FFI_Handler* instantiate_site = nullptr)
      : Registered(this),
        target(target_name),
        execute(execute_call),
        instantiate(instantiate_site) {}

  const char* target;
  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* instantiate;
};

// The type of a call site's state, `State`.
struct TypeRegistration : Registered<TypeRegistration> {
  template <typename State>
  TypeRegistration(const char* type_name, State*)
      : Registered(this),
        name(type_name),
        id(&State::id),
        info(xla::ffi::MakeTypeInfo<State>()) {}

  const char* name;
  XLA_FFI_TypeId* id;
  XLA_FFI_TypeInfo info;
};

// The handler that calls `function` with what `bind()` says.
template <auto function, auto bind, xla::ffi::Traits... traits>
XLA_FFI_Error* Execute(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler = bind().To(function, {traits...}).release();
  return handler->Call(call_frame);
}

// The handler that makes the state of a call site from its attributes.
template <auto function>
XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler =
      xla::ffi::Ffi::BindInstantiate().Attrs().To(function).release();
  return handler->Call(call_frame);
}

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_HANDLERS_H_
