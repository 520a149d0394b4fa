//! Values of keys, as texts: each function returns `None` for a text that is none of its kind.

use qcow::SnapshotSelector;

use super::{MAX_QUEUES, QueueAffinity};
use crate::key_value;

/// One more than the largest CPU number the kernel's affinity call takes.
const CPU_LIMIT: usize = 1024;

pub(super) fn non_empty(value: &str) -> Option<&str> {
    (!value.is_empty()).then_some(value)
}

pub(super) fn snapshot(value: &str) -> Option<SnapshotSelector> {
    let which = SnapshotSelector::parse(value);
    let (SnapshotSelector::Id(text) | SnapshotSelector::Name(text) | SnapshotSelector::Any(text)) = &which;
    non_empty(text)?;
    Some(which)
}

pub(super) fn on_off(value: &str) -> Option<bool> {
    match value {
        "on" | "true" => Some(true),
        "off" | "false" => Some(false),
        _ => None,
    }
}

/// Plain decimal digits in `min..=max`.
pub(super) fn number(value: &str, min: u32, max: u32) -> Option<u32> {
    let plain = value.bytes().all(|byte| byte.is_ascii_digit());
    value
        .parse()
        .ok()
        .filter(|number| plain && (min..=max).contains(number))
}

/// `[1,3-5]`: the CPUs, each once, in order.
pub(crate) fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for item in key_value::list(text)? {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let cpu = |text| number(text, 0, CPU_LIMIT as u32 - 1);
        let (first, last) = (cpu(first)?, cpu(last)?);
        if first > last {
            return None;
        }
        numbers.extend((first..=last).map(|cpu| cpu as usize));
    }
    numbers.sort_unstable();
    numbers.dedup();
    Some(numbers)
}

/// `[0@[1,3],1@[2-5]]`: each queue once, each with at least one CPU.
pub(super) fn affinity(value: &str) -> Option<Vec<QueueAffinity>> {
    let mut queues: Vec<QueueAffinity> = Vec::new();
    for entry in key_value::list(value)? {
        let (queue, cpus) = entry.split_once('@')?;
        let queue = number(queue, 0, u32::from(MAX_QUEUES) - 1)?.try_into().ok()?;
        let numbers = cpu_list(cpus)?;
        if queues.iter().any(|known| known.queue == queue) {
            return None;
        }
        queues.push(QueueAffinity { queue, cpus: numbers });
    }
    Some(queues)
}
