//! Opening, reading and writing arbitrary bytes in a file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::whole::body(bytes);
});
