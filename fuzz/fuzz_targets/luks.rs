//! LUKS headers with changed fields and key material.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::luks::body(bytes);
});
