//! What the fuzz targets have in common: the bodies, and seeds to start from.
//!
//! Each body takes bytes and asserts what must hold for all of them; the targets under
//! `fuzz_targets/` only feed them. `cargo run --example seeds` fills `corpus/` with small sound
//! images, which random bytes would take long to become.

pub mod image;
pub mod parse;
pub mod seeds;
