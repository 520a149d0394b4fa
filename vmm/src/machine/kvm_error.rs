//! Errors of KVM itself.

use std::io;

use super::MachineError;

/// The one version of KVM's interface that there has ever been.
pub(super) const API_VERSION: i32 = 12;

/// KVM cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// There is no KVM.
    #[error(
        "/dev/kvm is missing: load the module kvm-intel or kvm-amd, and enable virtualization in the firmware \
         or, inside a virtual machine, nesting"
    )]
    Missing,
    /// This user may not use it.
    #[error("/dev/kvm cannot be opened by this user: join the group kvm, or run as root")]
    Forbidden,
    /// It is something else.
    #[error("/dev/kvm is not the KVM device, or has an unknown API version; expected {API_VERSION}")]
    Strange,
    /// It is too old.
    #[error("this kernel's KVM does not support {what}")]
    Lacks {
        /// The missing feature.
        what: &'static str,
    },
    /// It refuses something.
    #[error("KVM refused {what}")]
    Refuses {
        /// The step.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// An error for a step that KVM refused.
pub(super) fn refuses(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> MachineError {
    move |error| {
        let source = io::Error::from_raw_os_error(error.errno());
        KvmError::Refuses { what, source }.into()
    }
}
