//! Sound images with fields changed on purpose: opened, read, written, checked.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::mutated::body(bytes);
});
