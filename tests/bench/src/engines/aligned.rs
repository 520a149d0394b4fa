//! Bytes at an address that O_DIRECT accepts, without asking the allocator for anything special.

/// The alignment, in bytes.
const ALIGN: usize = 4096;

/// A buffer of fixed length at a multiple of 4 KiB.
#[derive(Debug)]
pub(crate) struct Aligned {
    bytes: Vec<u8>,
    from: usize,
    len: usize,
}

impl Aligned {
    /// `len` bytes, none of them zero.
    #[must_use]
    pub(crate) fn new(len: usize) -> Self {
        let bytes = vec![0xa5; len + ALIGN];
        let from = bytes.as_ptr().align_offset(ALIGN);
        Self { bytes, from, len }
    }

    /// The bytes.
    pub(crate) fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.from..self.from + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_buffer_has_its_length_and_alignment() {
        let mut buffer = Aligned::new(512);
        assert_eq!(buffer.as_mut().len(), 512);
        assert_eq!(buffer.as_mut().as_ptr() as usize % ALIGN, 0);
    }
}
