//! Info, check and repair of arbitrary bytes in a file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::tools::body(bytes);
});
