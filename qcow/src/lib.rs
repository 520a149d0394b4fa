//! Placeholder while the crate is being laid out.

#![forbid(unsafe_code)]

pub mod format;
pub mod image;
