//! The header extensions alone, from arbitrary bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::extensions::body(bytes);
});
