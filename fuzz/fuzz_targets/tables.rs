//! The snapshot table and the bitmap directory and tables, changed in a sound image.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::tables::body(bytes);
});
