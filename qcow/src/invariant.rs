//! Assertions on states that only this crate's own code can break.
//!
//! An error, and never an assertion, meets what an image, a guest or the host can break.

/// True where [`invariant!`] is checked: in debug builds (all tests, fuzzing), and in others with the feature
/// `assertions` (the explorer). Not where the canaries break rules on purpose: their symptoms are looked for elsewhere.
pub(crate) const CHECKED: bool =
    cfg!(any(debug_assertions, feature = "assertions")) && !cfg!(feature = "canary");

/// Panics if a condition does not hold that only this crate's own code can break. Costs nothing where it is not
/// checked, and changes no state where it is.
macro_rules! invariant {
    ($($condition:tt)*) => {
        if $crate::invariant::CHECKED {
            assert!($($condition)*);
        }
    };
}

pub(crate) use invariant;
