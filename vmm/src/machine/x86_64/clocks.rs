//! The clocks of a PC that firmware reads: the ACPI timer, and the clock in CMOS.
//!
//! Kernels use KVM's clock, and the tables tell them of neither: the machine is hardware-reduced, with no clock in CMOS. EDK II's build
//! for Cloud Hypervisor waits by the one, at a port that it knows (`OvmfPkg/Include/IndustryStandard/CloudHv.h`), without end if it
//! stands still. From the other it has the time (`PcAtChipsetPkg/PcatRealTimeClockRuntimeDxe`), also for the kernel that asks EFI.
//!
//! Both always run, and are the host's: what a guest sets is lost.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::machine::bus::Ports;

/// The ports of the ACPI timer.
pub(in crate::machine) const TIMER_PORT: u16 = 0x608;
pub(in crate::machine) const TIMER_PORTS: u16 = 4;
/// Its ticks in a second. ACPI 6.5, 4.8.2.1.
const TIMER_HZ: u128 = 3_579_545;

/// The ports of the clock in CMOS: which byte, and the byte.
pub(in crate::machine) const CMOS_PORT: u16 = 0x70;
pub(in crate::machine) const CMOS_PORTS: u16 = 2;

/// A timer of 32 bits that nobody can stop.
#[derive(Debug)]
pub(in crate::machine) struct AcpiTimer(Instant);

impl AcpiTimer {
    pub(in crate::machine) fn new() -> Self {
        Self(Instant::now())
    }
}

impl Ports for AcpiTimer {
    fn read(&mut self, offset: u16, data: &mut [u8]) {
        let ticks = self.0.elapsed().as_nanos() * TIMER_HZ / 1_000_000_000;
        let bytes = (ticks as u32).to_le_bytes();
        for (to, from) in data.iter_mut().zip(bytes.iter().skip(offset.into())) {
            *to = *from;
        }
    }

    fn write(&mut self, _: u16, _: &[u8]) {}
}

/// Bytes of a Motorola MC146818A, and the century where PCs have it.
mod at {
    pub(super) const SECOND: u8 = 0x00;
    pub(super) const MINUTE: u8 = 0x02;
    pub(super) const HOUR: u8 = 0x04;
    pub(super) const WEEKDAY: u8 = 0x06;
    pub(super) const DAY: u8 = 0x07;
    pub(super) const MONTH: u8 = 0x08;
    pub(super) const YEAR: u8 = 0x09;
    pub(super) const RATES: u8 = 0x0A;
    pub(super) const MODES: u8 = 0x0B;
    pub(super) const INTERRUPTS: u8 = 0x0C;
    pub(super) const POWER: u8 = 0x0D;
    pub(super) const CENTURY: u8 = 0x32;
}

/// The oscillator runs, at the usual rate, and no update is in progress.
const RATES: u8 = 0x26;
/// The mode of binary numbers, which a guest may choose, and that of 24 hours, which stays.
const BINARY: u8 = 1 << 2;
const HOURS_24: u8 = 1 << 1;
/// The battery is good.
const VALID: u8 = 1 << 7;
/// The bit of the index port that is not of the index: non-maskable interrupts.
const INDEX: u8 = 0x7F;

/// The clock in CMOS, in UTC, without interrupts. Its other bytes are memory.
#[derive(Debug)]
pub(in crate::machine) struct Cmos {
    index: u8,
    bytes: [u8; 128],
}

impl Cmos {
    pub(in crate::machine) fn new() -> Self {
        Self {
            index: 0,
            bytes: [0; 128],
        }
    }

    /// Reads the selected byte, `seconds` after the beginning of 1970.
    fn byte(&self, seconds: u64) -> u8 {
        let (days, of_day) = (seconds / 86_400, seconds % 86_400);
        let (year, month, day) = date(days);
        let number = match self.index {
            at::SECOND => of_day % 60,
            at::MINUTE => of_day / 60 % 60,
            at::HOUR => of_day / 3600,
            // The first day of 1970 was a Thursday; Sunday is 1.
            at::WEEKDAY => (days + 4) % 7 + 1,
            at::DAY => day,
            at::MONTH => month,
            at::YEAR => year % 100,
            at::CENTURY => year / 100 % 100,
            at::RATES => return RATES,
            at::MODES => return self.bytes[usize::from(at::MODES)] & BINARY | HOURS_24,
            at::INTERRUPTS => return 0,
            at::POWER => return VALID,
            other => return self.bytes[usize::from(other)],
        };
        // All of them are below 100.
        let number = number as u8;
        if self.bytes[usize::from(at::MODES)] & BINARY != 0 {
            return number;
        }
        number / 10 * 16 + number % 10
    }
}

impl Ports for Cmos {
    fn read(&mut self, offset: u16, data: &mut [u8]) {
        if let (1, [byte]) = (offset, data) {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            *byte = self.byte(since.as_secs());
        }
    }

    fn write(&mut self, offset: u16, data: &[u8]) {
        match (offset, data) {
            (0, &[index]) => self.index = index & INDEX,
            (1, &[byte]) => self.bytes[usize::from(self.index)] = byte,
            _ => {}
        }
    }
}

/// Returns year, month and day of a day, counted from the first of 1970, in the Gregorian calendar.
fn date(days: u64) -> (u64, u64, u64) {
    const ERA_DAYS: u64 = 146_097;
    // Years that begin in March end with the leap day; eras of 400 of them are all alike.
    let from_march_of_year_0 = days + 719_468;
    let (era, day) = (from_march_of_year_0 / ERA_DAYS, from_march_of_year_0 % ERA_DAYS);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = era * 400 + year + u64::from(month <= 2);
    (year, month, day_of_month)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn read(cmos: &mut Cmos, index: u8) -> u8 {
        let mut byte = [0];
        cmos.write(0, &[index]);
        cmos.read(1, &mut byte);
        byte[0]
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        let days_of = |year: u64, month: u64| match month {
            2 if year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400)) => 29,
            2 => 28,
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        };
        let mut day = 0;
        for year in 1970..2410 {
            for month in 1..=12 {
                for of_month in 1..=days_of(year, month) {
                    assert_eq!(date(day), (year, month, of_month));
                    day += 1;
                }
            }
        }
    }

    /// The second before 1 March 2024, a Thursday: `date -u -d @1709251199`.
    #[test]
    fn cmos_tells_the_time_in_either_mode() {
        let mut cmos = Cmos::new();
        let fields = [
            at::CENTURY,
            at::YEAR,
            at::MONTH,
            at::DAY,
            at::WEEKDAY,
            at::HOUR,
            at::MINUTE,
            at::SECOND,
        ];
        let said = |cmos: &mut Cmos| {
            fields.map(|index| {
                cmos.write(0, &[index | 0x80]);
                cmos.byte(1_709_251_199)
            })
        };
        assert_eq!(said(&mut cmos), [0x20, 0x24, 2, 0x29, 5, 0x23, 0x59, 0x59]);
        cmos.write(0, &[at::MODES]);
        cmos.write(1, &[BINARY]);
        assert_eq!(read(&mut cmos, at::MODES), BINARY | HOURS_24);
        assert_eq!(said(&mut cmos), [20, 24, 2, 29, 5, 23, 59, 59]);
        // It is valid, keeps what is no part of the clock, and goes on with the host's time whatever is set.
        assert_eq!(
            (read(&mut cmos, at::POWER), read(&mut cmos, at::RATES)),
            (VALID, RATES)
        );
        for index in [at::CENTURY, 0x40] {
            cmos.write(0, &[index]);
            cmos.write(1, &[77]);
        }
        assert_eq!((read(&mut cmos, at::CENTURY), read(&mut cmos, 0x40)), (20, 77));
    }

    #[test]
    fn timer_goes_on_at_its_rate() {
        let mut timer = AcpiTimer::new();
        let mut ticks = || {
            let mut bytes = [0; 4];
            timer.read(0, &mut bytes);
            u128::from(u32::from_le_bytes(bytes))
        };
        let (began, before) = (Instant::now(), ticks());
        while began.elapsed() < Duration::from_millis(20) {}
        let passed = ticks() - before;
        let most = (began.elapsed().as_nanos() * TIMER_HZ).div_ceil(1_000_000_000);
        assert!(
            (TIMER_HZ / 50..=most).contains(&passed),
            "{passed} ticks, of {most}"
        );
        let (mut whole, mut upper) = ([0; 4], [0; 2]);
        timer.read(0, &mut whole);
        timer.read(2, &mut upper);
        assert!(upper[1] >= whole[3]);
    }
}
