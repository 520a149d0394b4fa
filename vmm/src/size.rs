//! Sizes as people write and read them: `64k`, `1.5M`, `0x200`; `64 KiB`.
//!
//! Units are powers of 1024. Parsing is exact: a size that is not a whole number of bytes, or does
//! not fit, is an error and never rounded.

/// A text that is not a size.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum SizeError {
    /// No number, or something after the suffix.
    #[error("not a number of bytes with an optional K, M, G, T, P or E")]
    Malformed,
    /// More than 2⁶³ − 1 bytes, which is as far as a file can reach.
    #[error("more bytes than a file can hold")]
    TooLarge,
    /// A fraction that does not come to whole bytes.
    #[error("not a whole number of bytes")]
    Fraction,
}

/// The largest size accepted: file offsets are signed.
const MAX_BYTES: u128 = i64::MAX as u128;

/// Parses a size in bytes: decimal, with an optional fraction and a suffix `b k M G T P E`
/// of either case, or hexadecimal after `0x`, without a suffix.
///
/// # Errors
///
/// [`SizeError`], saying which rule was broken.
pub fn parse_bytes(text: &str) -> Result<u64, SizeError> {
    let bytes = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => {
            if hex.is_empty() || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(SizeError::Malformed);
            }
            u128::from_str_radix(hex, 16).map_err(|_| SizeError::TooLarge)?
        }
        None => parse_decimal(text)?,
    };
    if bytes > MAX_BYTES {
        return Err(SizeError::TooLarge);
    }
    u64::try_from(bytes).map_err(|_| SizeError::TooLarge)
}

/// The decimal form: `digits[.digits][suffix]`.
fn parse_decimal(text: &str) -> Result<u128, SizeError> {
    let (number, unit) = match text.char_indices().next_back() {
        Some((at, suffix)) if suffix.is_ascii_alphabetic() => (&text[..at], unit_bytes(suffix)?),
        _ => (text, 1),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(fraction) {
        return Err(SizeError::Malformed);
    }
    let whole: u128 = whole.parse().map_err(|_| SizeError::TooLarge)?;
    let whole_bytes = whole.checked_mul(unit).ok_or(SizeError::TooLarge)?;

    // No unit has more than 60 binary places, so a longer fraction cannot come to whole bytes.
    let fraction = fraction.trim_end_matches('0');
    if fraction.len() > 18 {
        return Err(SizeError::Fraction);
    }
    let numerator: u128 = if fraction.is_empty() {
        0
    } else {
        fraction.parse().map_err(|_| SizeError::Fraction)?
    };
    let denominator = 10_u128.pow(u32::try_from(fraction.len()).map_err(|_| SizeError::Fraction)?);
    let scaled = numerator.checked_mul(unit).ok_or(SizeError::TooLarge)?;
    if !scaled.is_multiple_of(denominator) {
        return Err(SizeError::Fraction);
    }
    whole_bytes
        .checked_add(scaled / denominator)
        .ok_or(SizeError::TooLarge)
}

fn unit_bytes(suffix: char) -> Result<u128, SizeError> {
    let power = "bkmgtpe"
        .find(suffix.to_ascii_lowercase())
        .ok_or(SizeError::Malformed)?;
    Ok(1 << (10 * power))
}

/// Units of 1024, each with its name; the first is a byte.
pub(crate) const UNITS: [&str; 7] = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// A size for people, in the largest unit it reaches: `512 bytes`, `64 KiB`, `1.500 KiB`. What is left of the whole
/// after three decimals is not shown, as in QEMU's tools.
#[must_use]
pub fn human(bytes: u64) -> String {
    let power = (bytes.max(1).ilog2() / 10) as usize;
    let unit = 1_u64 << (10 * power);
    in_unit(bytes as f64 / unit as f64, UNITS[power])
}

/// `value` with three decimals, or with none if they are zeros, and its unit.
pub(crate) fn in_unit(value: f64, unit: &str) -> String {
    let text = format!("{value:.3}");
    format!("{} {unit}", text.strip_suffix(".000").unwrap_or(&text))
}

/// A size for people in three significant digits: `512 B`, `196 KiB`, `1.25 MiB`, `0.977 GiB`.
#[must_use]
pub fn human_short(bytes: u64) -> String {
    const SHORT: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    // From 1000 of a unit on, the next one needs fewer digits.
    let mut power = 0;
    let mut value = bytes as f64;
    while value >= 999.5 && power + 1 < SHORT.len() {
        value /= 1024.0;
        power += 1;
    }
    let decimals = match value {
        value if value < 1.0 => 3,
        value if value < 9.995 => 2,
        value if value < 99.95 => 1,
        _ => 0,
    };
    let text = format!("{value:.decimals$}");
    let text = if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        &text
    };
    format!("{text} {}", SHORT[power])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_bytes_takes_decimal_hex_and_suffixes() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512b", 512),
            ("64k", 65536),
            ("64K", 65536),
            ("1M", 1 << 20),
            ("2g", 2 << 30),
            ("3T", 3 << 40),
            ("1P", 1 << 50),
            ("7E", 7 << 60),
            ("0x200", 512),
            ("0XfF", 255),
            ("1.5k", 1536),
            ("0.5k", 512),
            ("1.0", 1),
            ("9223372036854775807", i64::MAX as u64),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn parse_bytes_refuses_other_text_and_never_rounds() {
        use SizeError::{Fraction, Malformed, TooLarge};
        for (text, error) in [
            ("", Malformed),
            ("k", Malformed),
            ("-1", Malformed),
            ("+1", Malformed),
            (" 1", Malformed),
            ("1 k", Malformed),
            ("1kk", Malformed),
            ("1kB", Malformed),
            ("1x", Malformed),
            ("1é", Malformed),
            (".5k", Malformed),
            ("1.", Malformed),
            ("1.5.5", Malformed),
            ("0x", Malformed),
            ("0x+1", Malformed),
            ("0x10k", Malformed),
            ("1.5", Fraction),
            ("1.0001k", Fraction),
            ("0.0000000000000000001E", Fraction),
            ("8E", TooLarge),
            ("9223372036854775808", TooLarge),
            ("0x8000000000000000", TooLarge),
            ("0xfffffffffffffffffffffffffffffffffffff", TooLarge),
            ("999999999999999999999999999999999999999999", TooLarge),
            ("340282366920938463463374607431768211455E", TooLarge),
        ] {
            assert_eq!(parse_bytes(text), Err(error), "{text:?}");
        }
    }

    #[test]
    fn human_uses_the_largest_unit_reached() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (512, "512 bytes"),
            (1023, "1023 bytes"),
            (1024, "1 KiB"),
            (1536, "1.500 KiB"),
            (65536, "64 KiB"),
            (64 << 20, "64 MiB"),
            ((64 << 20) + 512, "64 MiB"),
            ((64 << 20) + 1024, "64.001 MiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }

    #[test]
    fn human_short_has_three_significant_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (200_704, "196 KiB"),
            (1_310_720, "1.25 MiB"),
            (64 << 20, "64 MiB"),
            (1 << 30, "1 GiB"),
            (1023 << 20, "0.999 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(human_short(bytes), text);
        }
    }
}
