//! Operation sequences against a plain array of bytes, on the asynchronous engine.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::model::body(bytes);
});
