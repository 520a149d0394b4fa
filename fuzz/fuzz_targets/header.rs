//! The header and its extensions, from arbitrary bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::header::body(bytes);
});
